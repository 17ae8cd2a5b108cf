# SPDX-License-Identifier: Apache-2.0
"""This module makes all system calls of a prefix store. Names are looked up in one open folder, and no link is
followed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from typing import Any, NamedTuple

SEGMENT = re.compile(r"[0-9a-f]{32}\.segment")
UNFINISHED = re.compile(r"[0-9a-f]{32}\.new")  # a segment that has no header yet


class Found(NamedTuple):
    """Says what eviction goes by. num_bytes: what the file takes on the disk, or may come to take while it is in use;
    in_use: whether a process appends to it; last_use: seconds since 1970."""

    name: str
    num_bytes: int
    last_use: float
    in_use: bool


class Folder:
    """Is an open folder of segments.

    Args:
        path: of the folder, which is made where it is missing.

    Raises:
        ValueError: the path is a link or no folder, or somebody else owns it or may enter it.
        OSError: the folder can neither be opened nor made.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with contextlib.suppress(FileExistsError):
            os.makedirs(self.path, 0o700)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise ValueError(f"path: {self.path} is a link or no folder") from None
            raise
        try:
            found = os.fstat(self._fd)
            if found.st_uid != os.geteuid():
                raise ValueError(f"path: {self.path} is owned by user {found.st_uid}, expected {os.geteuid()}")
            if mode := stat.S_IMODE(found.st_mode) & 0o077:
                raise ValueError(
                    f"path: {self.path} has mode {stat.S_IMODE(found.st_mode):04o}, others have {mode:03o} of it: "
                    "expected 0700"
                )
        except ValueError:
            self.close()
            raise

    def _open(self, name: str, flags: int) -> int:
        """Opens a file of the folder, no link, and a FIFO without waiting."""
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        return os.open(name, flags, 0o600, dir_fd=self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def names(self) -> list[str]:
        """Lists the names of segments."""
        return [name for name in os.listdir(self._fd) if SEGMENT.fullmatch(name)]

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """Opens a file for reading, as :meth:`open_file` does, and closes it."""
        fd = self.open_file(name)
        try:
            yield fd
        finally:
            os.close(fd)

    def open_file(self, name: str) -> int:
        """Opens a file for reading.

        Raises:
            ValueError: the name is no regular file that is the user's alone.
            OSError: it cannot be opened.
        """
        fd = self._open(name, os.O_RDONLY)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{name}: is no regular file")
            if found.st_uid != os.geteuid() or found.st_mode & 0o022 or found.st_nlink > 1:
                raise ValueError(f"{name}: others own it or may write to it, or it has another name besides")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def read(self, fd: int, buffer: Any, offset: int) -> int:
        """Reads bytes into a buffer, and gives how many there were."""
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view):
            count = os.preadv(fd, [view[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def read_ahead(self, fd: int, offset: int, size: int) -> None:
        """Has the system begin to read a part of a file, where it takes such advice."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)

    def write(self, fd: int, data: Any, offset: int) -> None:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += os.pwrite(fd, view[done:], offset + done)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def create(self, name: str, size: int, header: bytes) -> int:
        """Makes a file that begins with a header and reads as zeros behind that, and gives it open and locked. The
        name is there once the header is on the disk. The lock lasts until the file is closed, or its process ends in
        whichever way.

        Raises:
            OSError: it cannot be made.
        """
        unfinished = name.replace(".segment", ".new")
        fd = self._open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            import fcntl  # imported in functions: where there is none, the package works without a store

            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, size)
            self.write(fd, header, 0)
            self.sync(fd)
            os.rename(unfinished, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            os.fsync(self._fd)
        except BaseException:
            os.close(fd)
            for each in (unfinished, name):
                with contextlib.suppress(OSError):
                    os.unlink(each, dir_fd=self._fd)
            raise
        return fd

    def close_file(self, fd: int) -> None:
        os.close(fd)

    def mark_used(self, fd: int) -> None:
        """Writes down that a file is used now. Where that fails it may be evicted earlier, which is no error."""
        with contextlib.suppress(OSError):
            os.utime(fd)

    def survey(self) -> list[Found]:
        """Looks at all files of the store, those unused for longest first. What is no regular file takes no room."""
        found = []
        for name in os.listdir(self._fd):
            if SEGMENT.fullmatch(name) or UNFINISHED.fullmatch(name):
                with contextlib.suppress(OSError, ValueError), self.opened(name) as fd:
                    about, in_use = os.fstat(fd), _in_use(fd)
                    num_bytes = about.st_size if in_use else about.st_blocks * 512
                    found.append(Found(name, num_bytes, about.st_mtime, in_use))
        return sorted(found, key=lambda each: (each.last_use, each.name))

    def remove(self, name: str, leased: bool = True) -> bool:
        """Removes a file unless a process appends to it, and says whether it did. A process that has it open can still
        read it. leased: also one on which a process has a lease."""
        try:
            with self.opened(name) as fd:
                if _in_use(fd) or not (leased or _locks(fd, shared=False)):
                    return False
                os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            return False
        return True


def _in_use(fd: int) -> bool:
    """Says whether the process that made a file still has it open to append to. Files are locked for that before they
    get their names and never again, so one that is not in use will not be. While a file is being removed it may seem to
    be."""
    return not _locks(fd, shared=True)


def lease(fd: int) -> bool:
    """Has other files be removed before this one, until it is closed or its process ends, and says whether that is so
    now. It is not while somebody appends to the file, which then stays anyway."""
    return _locks(fd, shared=True)


def _locks(fd: int, shared: bool) -> bool:
    """Locks a file, together with others or alone, and says whether others' locks let it."""
    import fcntl

    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
