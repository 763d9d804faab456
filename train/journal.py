"""Finished rows of a long preparation, kept line by line so that it can go on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

NAME = "journal.part"


class Journal:
    """The file ``folder/journal.part`` and its ``records``: those found there, then those added. Its first line holds ``settings`` (plain JSON values).

    Nothing is written before ``open``. A torn last line is left out. Raises ValueError naming what differs when the journal was begun with other
    settings, or the line that is damaged; with ``overwrite`` such a journal is dropped instead.
    """

    def __init__(self, folder: Path, settings: dict, *, overwrite: bool = False):
        self.path, self.settings, self.records = folder / NAME, settings, []
        self.size = 0  # bytes of the file that are of use
        self._file = None
        if self.path.is_file():
            try:
                self._read()
            except ValueError:
                if not overwrite:
                    raise
                self.records, self.size = [], 0

    def _read(self) -> None:
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise ValueError(f"a {type(record).__name__}, not an object")
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{self.path}, line {number} is damaged: {error}; start anew with --overwrite") from error
                self.records.append(record)
                self.size += len(line)
        theirs = self.records.pop(0).get("settings") if self.records else None
        if theirs != self.settings:
            if self.records:
                self._refuse(theirs if isinstance(theirs, dict) else {})
            self.size = 0  # begun, but nothing was finished

    def _refuse(self, theirs: dict) -> None:
        names = [name for name in {**theirs, **self.settings} if theirs.get(name) != self.settings.get(name)]
        differing = "; ".join(f"{name} {json.dumps(theirs.get(name))} there, {json.dumps(self.settings.get(name))} now" for name in names)
        raise ValueError(f"{self.path} was begun with other settings: {differing}; give the same ones to go on, or --overwrite to start anew")

    def open(self) -> None:
        """Make the folder and the file, cut off a torn line, and get ready to append."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "r+b" if self.size else "wb")
        self._file.truncate(self.size)
        self._file.seek(self.size)
        if not self.size:
            self._write({"settings": self.settings})

    def add(self, record: dict) -> None:
        """Append one record; it has left this process when the call returns."""
        self._write(record)
        self.records.append(record)

    def _write(self, record: dict) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file, if it was opened."""
        if self._file is not None:
            self._file.close()
