"""Build the wheel and compare its files with the tree: what is missing, what does not belong there."""

# ruff: noqa: T201 - a check prints

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def expected() -> set[str]:
    """Tracked files of the package and of the Hydra plugin, under the names that they have in the wheel."""
    listed = subprocess.run(
        ["git", "ls-files", "plugin/equipoise", "plugin/hydra_plugins", "conf", "trainer_hooks"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    names: set[str] = set()
    for line in listed:
        path = Path(line)
        if (ROOT / path).is_symlink() or path.suffix not in {".py", ".yaml", ".typed"}:
            continue
        inside = path.relative_to("plugin") if path.parts[0] == "plugin" else Path("equipoise") / path
        names.add(inside.as_posix())
    return names


def built() -> set[str]:
    """Files of a freshly built wheel, without its metadata."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, str(ROOT)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"the wheel does not build:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        (wheel,) = Path(out).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return {name for name in archive.namelist() if ".dist-info/" not in name}


def main() -> None:
    """Exit 1 with the difference, if there is one."""
    tree, wheel = expected(), built()
    for name in sorted(tree - wheel):
        print(f"in the tree, not in the wheel: {name}")
    for name in sorted(wheel - tree):
        print(f"in the wheel, not in the tree: {name}")
    if tree != wheel:
        sys.exit(1)
    print(f"the wheel holds the {len(tree)} files of the tree")


if __name__ == "__main__":
    main()
