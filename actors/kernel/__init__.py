"""The actor runtime: mailboxes, deadlines, cancellation, supervision, journal, replay. Imports messages only."""
