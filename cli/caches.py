"""Where compilers and plotting may keep files when the home directory cannot be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

CACHE_VARIABLES = {
    "XDG_CACHE_HOME": "cache",
    "XDG_DATA_HOME": "data",
    "XDG_CONFIG_HOME": "config",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "MPLCONFIGDIR": "matplotlib",
}
"""Variable -> folder below the replacement. Triton alone would otherwise write `/.triton`."""


def redirect_unwritable_caches(variables: MutableMapping[str, str] = os.environ) -> Path | None:
    """Point every cache at a private folder in the temporary directory, if home cannot be written.

    Returns the folder, or None where home is fine. Variables that the user set stay. Child processes inherit them.
    """
    if _writable(Path(os.path.expanduser("~"))):
        return None
    root = _private_folder()
    for name, folder in CACHE_VARIABLES.items():
        variables.setdefault(name, str(root / folder))
    return root


def _writable(home: Path) -> bool:
    # An unknown user without HOME leaves "~" as it is; a container's nobody gets "/".
    return home.is_absolute() and home != Path("/") and os.access(home, os.W_OK | os.X_OK)


def _private_folder() -> Path:
    """`<tmp>/attn-graph-<uid>`, ours and closed to others; another name where somebody else holds that one."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"attn-graph-{user}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if not folder.is_symlink() and folder.stat().st_uid == user:
            return folder
    except FileExistsError:
        pass
    return Path(tempfile.mkdtemp(prefix="attn-graph-"))
