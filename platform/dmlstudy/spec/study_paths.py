"""The paths in a study file made absolute, for workers have other working folders and perhaps another home."""

from __future__ import annotations

import os
from pathlib import Path

from dmlstudy.text import shown


class Places:
    """The folders that relative paths are looked for in: the study file's own, then the current one.

    ``notes`` holds a line for each path that only the second one has, and ``local`` each path that another machine
    would read otherwise, by its key.
    """

    def __init__(self, *folders: str | os.PathLike[str]) -> None:
        whole = [os.path.abspath(folder) for folder in folders or (Path.cwd(),)]
        self.folders = tuple(dict.fromkeys(whole))
        self.notes: dict[str, str] = {}
        self.local: dict[str, str] = {}
        self._led: dict[tuple[str, str], str] = {}

    def leads(self, path: str) -> bool:
        """True if the path leads to an existing file or folder."""
        return "\0" not in path and any(os.path.exists(place) for place in self._whole(path))

    def lead(self, key: str, path: str) -> str:
        """The absolute path that ``key`` of the study file means by ``path``.

        Raises ValueError where both folders have it, and for a ``~`` of an unknown user.
        """
        if (key, path) not in self._led:
            self._led[key, path] = self._find(key, path)
        return self._led[key, path]

    def looked_in(self, key: str) -> str:
        """An addition to the message that a relative path leads nowhere; empty for an absolute one."""
        if key not in self.local or len(self.folders) < 2:
            return ""
        return f", nor {self.local[key]} in the current folder {self.folders[1]}; set {key}"

    def _find(self, key: str, path: str) -> str:
        if "\0" in path:
            raise ValueError(f"{key}: {shown(path)} is no path; take the NUL out")
        if path.startswith("~") and os.path.expanduser(path).startswith("~"):
            raise ValueError(f"{key}: {path} begins with the home of a user who is not here; write it out")
        own, *others = self._whole(path)
        if path.startswith("~") or not os.path.isabs(path):
            self.local[key] = path
        found = [place for place in (own, *others) if os.path.exists(place)]
        if len({os.path.realpath(place) for place in found}) > 1:
            raise ValueError(
                f"{key}: {path} is {found[0]} beside the study file and {found[1]} in the current folder;"
                " write the absolute path of the one you mean"
            )
        if found and own not in found:
            self.notes[key] = (
                f"{key}: {path} is not beside the study file but in the current folder, {found[0]}; write it"
                " relative to the study file, and it is found from anywhere"
            )
        return found[0] if found else own

    def _whole(self, path: str) -> list[str]:
        whole = os.path.expanduser(path)
        return [os.path.abspath(os.path.join(folder, whole)) for folder in self.folders]
