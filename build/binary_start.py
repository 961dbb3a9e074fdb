"""The first lines of Python in every process of the one-file program; then it is `hydra`.

Its own libraries were found through LD_LIBRARY_PATH, which PyInstaller's loader has set; programs of the box that hydra
starts (systemctl, nvidia-smi) must not find them there. And while a process lives, its folder may not be removed by
the start of another version: the shared lock says so (build/binary_stub.sh asks before it removes one).
"""

import fcntl
import os
import sys

# With these a child would take itself for a part of this process, and LD_LIBRARY_PATH for set.
for name in [name for name in os.environ if name.startswith("_PYI_")]:
    del os.environ[name]
before = os.environ.pop("LD_LIBRARY_PATH_ORIG", None)
if before:
    os.environ["LD_LIBRARY_PATH"] = before
else:
    os.environ.pop("LD_LIBRARY_PATH", None)

try:
    # Kept open until the process ends.
    fcntl.flock(os.open(os.path.dirname(sys.executable), os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit("hydra: this version is being removed by the start of another one; start it again")
except OSError:
    pass  # a file system without locks: nothing is removed there either

from hydra.cli import main  # noqa: E402

main()
