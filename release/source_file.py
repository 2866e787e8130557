"""Source distributions, written again so that the same content gives the same bytes."""

from __future__ import annotations

import gzip
import io
import os
import tarfile


def repeatable(archive: bytes) -> bytes:
    """Return a `.tar.gz` with its files in order, all of one moment and nobody's: that of `SOURCE_DATE_EPOCH`."""
    moment = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    written = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as given,
        gzip.GzipFile("", "wb", fileobj=written, mtime=moment) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as made,
    ):
        for member in sorted(given.getmembers(), key=lambda member: member.name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, member.size, moment
            plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            made.addfile(plain, given.extractfile(member) if member.isfile() else None)
    return written.getvalue()
