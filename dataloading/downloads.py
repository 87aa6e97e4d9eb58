"""Downloads that give up in time, check what came, and go on where an earlier one stopped."""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.parse
import urllib.request
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dataloading.course import URL_CHARACTERS, USER_AGENT
from dataloading.watchdog import time_limit

CHUNK_BYTES = 1 << 16
LARGE_BYTES = 1_000_000  # below this a download is over before anybody reads its progress bar
LEAST_BYTES_PER_S = 100_000  # a slower mirror is left for the next one
STALLED_BYTES_PER_S = 1_000  # the same where all other mirrors have failed
RANGE_NOT_SATISFIABLE = 416  # HTTP: there is nothing after the bytes we have already
NETWORK_ERRORS = (OSError, http.client.HTTPException)


class _Unfinished(ConnectionError):
    """A mirror is slow or stopped in the middle: worth a second try when the others have failed."""


def download_files(
    files: Sequence[tuple[str, str]], mirrors: Sequence[str], folder: Path, *, timeout_s: float
) -> str:
    """Download files into a folder, from the first mirror that delivers them whole and unchanged.

    A file that is there with the right checksum is left as it is. One that is under way is called
    `NAME.part`; when a mirror fails, or the program ends, the next try goes on from its end where
    the server allows that (HTTP Range), and else begins again.

    Args:
        files: Name and MD5 checksum of each file.
        mirrors: Addresses of folders that hold the files, each with a `/` at its end.
        folder: Existing folder to put them in.
        timeout_s: How long servers may be silent, in seconds, shared out evenly to the mirrors.

    Returns:
        The mirror that delivered the last of the files.

    Raises:
        ConnectionError: No mirror delivered; the text has one line for each, with its reason.
        OSError: A file cannot be written.

    Explained in: notebook 00
    """
    patience_s = timeout_s / len(mirrors)
    reasons: dict[str, str] = {}
    tries = [(mirror, LEAST_BYTES_PER_S) for mirror in mirrors]
    for mirror, least_bytes_per_s in tries:
        try:
            for name, md5 in files:
                _download(mirror + name, folder / name, md5, patience_s, least_bytes_per_s)
            return mirror
        except ConnectionError as error:
            reasons[mirror] = str(error)
            if isinstance(error, _Unfinished) and least_bytes_per_s == LEAST_BYTES_PER_S:
                tries.append((mirror, STALLED_BYTES_PER_S))
    raise ConnectionError("\n".join(f"- {mirror}: {why}" for mirror, why in reasons.items()))


def _download(
    address: str, target: Path, md5: str, patience_s: float, least_bytes_per_s: float
) -> None:
    """Have `target` with the right checksum, or raise ConnectionError with the reason."""
    from torchvision.datasets.utils import check_integrity

    if check_integrity(target, md5):
        return
    part = target.with_name(f"{target.name}.part")
    while True:
        resumed = _receive(address, part, patience_s, least_bytes_per_s)
        if check_integrity(part, md5):
            os.replace(part, target)
            return
        part.unlink()
        if not resumed:  # else the wrong bytes may be those that an earlier try left
            raise ConnectionError(f"{target.name} is not the expected file (its MD5 is not {md5})")


def _receive(address: str, part: Path, patience_s: float, least_bytes_per_s: float) -> bool:
    """Write what the server sends to `part`; True if that went on from an earlier try."""
    kept_bytes = part.stat().st_size if part.exists() else 0
    response = _request(address, kept_bytes, patience_s)
    if response is None:
        return True
    with response:
        span = response.headers.get("Content-Range") or ""
        resumed = kept_bytes > 0 and span.startswith(f"bytes {kept_bytes}-")
        done_bytes = kept_bytes if resumed else 0
        length = response.headers.get("Content-Length")
        total_bytes = done_bytes + int(length) if length else None
        print(f"[INFO] Downloading {address}...")
        with (
            open(part, "ab" if resumed else "wb") as file,
            _byte_bar(part.stem, done_bytes, total_bytes) as bar,
        ):
            for chunk in _chunks(response, patience_s, least_bytes_per_s):
                file.write(chunk)
                bar.update(len(chunk))
    received_bytes = part.stat().st_size
    if total_bytes is not None and received_bytes < total_bytes:
        raise _Unfinished(f"stopped after {received_bytes:,} of {total_bytes:,} bytes")
    return resumed


def _request(address: str, kept_bytes: int, patience_s: float) -> Any | None:
    """The server's answer; None if it has no more than the bytes that we have."""
    headers = {"User-Agent": USER_AGENT}
    if kept_bytes:
        headers["Range"] = f"bytes={kept_bytes}-"
    request = urllib.request.Request(urllib.parse.quote(address, URL_CHARACTERS), headers=headers)
    try:
        # The socket's own time-out begins anew with every step and every address of a name.
        with time_limit(patience_s, f"Opening {address}"):
            return urllib.request.urlopen(request, timeout=patience_s)
    except urllib.error.HTTPError as error:
        error.close()
        if kept_bytes and error.code == RANGE_NOT_SATISFIABLE:
            return None
        raise ConnectionError(f"HTTP {error.code} {error.reason}") from error
    except NETWORK_ERRORS as error:
        raise ConnectionError(_reason(error, patience_s)) from error


def _chunks(response: Any, patience_s: float, least_bytes_per_s: float) -> Iterator[bytes]:
    """What the server sends, as it comes, for as long as enough of it comes."""
    received_bytes = window_bytes = 0
    window_began = time.monotonic()
    while True:
        try:
            chunk = response.read1(CHUNK_BYTES)
        except NETWORK_ERRORS as error:
            kind = _Unfinished if received_bytes else ConnectionError
            raise kind(_reason(error, patience_s)) from error
        if not chunk:
            return
        yield chunk
        received_bytes += len(chunk)
        window_bytes += len(chunk)
        passed_s = time.monotonic() - window_began
        if passed_s >= patience_s:
            if window_bytes < least_bytes_per_s * passed_s:
                raise _Unfinished(f"only {window_bytes / passed_s / 1000:.1f} kB/s")
            window_bytes, window_began = 0, time.monotonic()


def _reason(error: Exception, patience_s: float) -> str:
    """Why a server could not be reached or understood, in a few words."""
    cause = getattr(error, "reason", error)  # urllib wraps what the system says
    if isinstance(cause, TimeoutError):
        return f"time-out: nothing came for {patience_s:.3g} s"
    return " ".join(str(cause).split()) or type(cause).__name__


def _byte_bar(name: str, done_bytes: int, total_bytes: int | None) -> Any:
    """A progress bar; without a picture for small files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm warns where ipywidgets is missing, and falls back
        from tqdm.auto import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # tqdm's monitor thread would outlive the bar

    return Bar(
        total=total_bytes,
        initial=done_bytes,
        desc=name,
        unit="B",
        unit_scale=True,
        leave=False,
        disable=(total_bytes or 0) < LARGE_BYTES,
    )
