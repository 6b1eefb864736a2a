"""Known vulnerabilities of the versions in constraints.txt: fails on one, and says so where nothing could be asked."""

import json
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".venv" / "audit"
SERVICE = "https://pypi.org/pypi/msgspec/{version}/json"
"""What pip-audit asks for each version."""
PROBE_S, INSTALL_S, AUDIT_S = 3.0, 60.0, 60.0
IGNORED: dict[str, str] = {}
"""Vulnerabilities that do not reach this library, by their id, each with the reason."""


def why_not() -> str | None:
    """Why the service cannot be asked; None if it can."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (version,) = [line.partition("==")[2] for line in lines if line.startswith("msgspec==")]
    url = SERVICE.format(version=version)
    try:
        with urllib.request.urlopen(url, timeout=PROBE_S) as answer:  # noqa: S310  # https, as written above
            known = "vulnerabilities" in json.load(answer)
    except (OSError, ValueError) as found:
        return f"{url} gives no answer ({found})"
    return None if known else f"{url} tells no vulnerabilities"


def audit() -> list[dict[str, object]]:
    """What pip-audit says of each version. Raises CalledProcessError, TimeoutExpired, OSError or ValueError."""
    if not (PLACE / "bin" / "pip-audit").exists():
        venv.create(PLACE, with_pip=True)
        install = [PLACE / "bin" / "python", "-m", "pip", "install", "--quiet", "pip-audit"]
        subprocess.run(install, check=True, timeout=INSTALL_S)
    options = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off", "--timeout", "10"]
    options += [word for name in IGNORED for word in ("--ignore-vuln", name)]
    command = [PLACE / "bin" / "pip-audit", "-r", ROOT / "constraints.txt", *options]
    done = subprocess.run(command, check=False, timeout=AUDIT_S, capture_output=True, text=True)
    found: list[dict[str, object]] = json.loads(done.stdout)["dependencies"]
    return found


def main() -> int:
    """The exit status: 1 for a known vulnerability, 0 otherwise."""
    reason = why_not()
    packages: list[dict[str, object]] = []
    if reason is None:
        try:
            packages = audit()
        except (subprocess.SubprocessError, OSError, ValueError, KeyError) as failed:
            reason = f"pip-audit did not work ({failed})"
    audited = [each for each in packages if "skip_reason" not in each]
    if not audited:
        sys.stdout.write(f"not audited: {reason or 'the service knows none of the packages'}\n")
        return 0
    wrong = [each for each in audited if each.get("vulns")]
    for each in wrong:
        sys.stdout.write(f"vulnerable: {each['name']} {each['version']}: {json.dumps(each['vulns'])[:500]}\n")
    sys.stdout.write(f"audited {len(audited)} of {len(packages)} versions, {len(wrong)} with a known vulnerability\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
