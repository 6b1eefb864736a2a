"""What is wrong with a remote's URL, as far as that shows without opening it, and the URL without its secrets."""

import re
from typing import Final
from urllib.parse import urlsplit

_BEFORE_QUERY: Final = re.compile(r"[^?#]*")
_USER: Final = re.compile(r"://[^/]*@")


def without_secrets(url: str) -> str:
    """A URL, or a text with URLs in it, without what may be a secret: credentials, query, fragment.

    In every URL of a chain too (``simplecache::https://host/weights``).
    """
    plain = _BEFORE_QUERY.match(url)
    assert plain is not None  # it matches everything
    return _USER.sub("://", plain[0])


def wrong_url(url: str) -> str | None:
    """Why this cannot be a remote's URL, in a sentence that holds no secret; None for one that may be."""
    shown = without_secrets(url)
    if shown != url:
        return (
            f"the remote {shown} has credentials, a query or a fragment in its URL, where logs would show them; give "
            "credentials in the environment or in the configuration of fsspec"
        )
    try:
        scheme = urlsplit(url).scheme
    except ValueError as problem:
        return f"the remote {url!r} is no URL: {problem}"
    return None if scheme else f"the remote must be a URL, found {url!r}; for a directory write file://{url}"
