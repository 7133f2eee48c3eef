"""Where checkpoints lie: one small interface, a directory behind ``file://`` and a bucket behind ``s3://``.

Paths are relative to the root, with forward slashes. A file appears whole or not at all, on either storage.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import unquote, urlsplit

from truestep.checkpoints.errors import AlreadyWrittenError, CheckpointCorruptError, CheckpointError, StorageError
from truestep.contract import REVOKED_NAME, FileEntry

_COPY_BYTES = 1 << 20
_HASHED_ASIDE_BYTES = 1 << 18
"""Below, handing over takes longer than hashing."""
_DISK_BYTES = 32 << 20
"""How much is written before the disk is asked to begin with it."""


class Storage(Protocol):
    """What checkpoints need from a storage. Methods raise `StorageError` where the storage fails."""

    @property
    def root_uri(self) -> str:
        """URI of the root, without a trailing slash."""

    def write_stream(self, path: str, write: Callable[[Any], Any]) -> FileEntry:
        """Let `write` stream a file's content; replace what was at `path`. The SHA-256 is taken while writing."""

    def write_once(self, path: str, content: bytes) -> None:
        """Create the file; raise `AlreadyWrittenError` where it exists, also against a concurrent writer."""

    def replace(self, path: str, content: bytes) -> None:
        """Write the file, replacing what was there."""

    def read(self, path: str) -> bytes | None:
        """The file's content, or None where there is none."""

    def open_verified(self, path: str, expected: FileEntry) -> AbstractContextManager[IO[bytes]]:
        """A seekable file whose bytes are `expected`'s. Raises `CheckpointCorruptError` naming the file otherwise."""

    def staging(self, directory: str) -> AbstractContextManager[Path]:
        """An empty local directory for files that `take` then moves below `directory`; removed at the end."""

    def take(self, path: str, source: Path) -> FileEntry:
        """Move a local file, from `staging`, to `path`, replacing what was there. The SHA-256 is taken on the way."""

    def fetch_verified(self, path: str, expected: FileEntry, target: Path) -> None:
        """Make a file readable at the local path `target`. Raises as `open_verified` does."""

    def directories(self, prefix: str) -> list[str]:
        """Names of the directories directly below the root that start with `prefix`, sorted."""

    def remove_file(self, path: str) -> None:
        """Remove the file; no error where there is none."""

    def remove_directory(self, name: str) -> bool:
        """Remove a directory below the root with everything in it, but for a revocation mark, which is permanent.

        False where there was nothing to remove.
        """


def _unwatched(count_bytes: int) -> None:
    """Nobody wants to know how much has been read."""


def root_as_uri(root: str) -> str:
    """`root`, an absolute path as ``file://``. A relative one stays: each rank may start in another directory."""
    return Path(root).as_uri() if root.startswith("/") else root


def open_storage(root_uri: str, *, on_read: Callable[[int], object] = _unwatched) -> Storage:
    """The storage behind ``file:///directory``, ``/directory`` or ``s3://bucket/prefix``. Creates and connects nothing.

    on_read: called with the bytes of each piece that is read and hashed, for a bar of progress.
    """
    parts = urlsplit(root_as_uri(root_uri))
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return FileStorage(Path(unquote(parts.path)), on_read=on_read)
    if parts.scheme == "s3" and parts.netloc:
        from truestep.checkpoints.s3 import S3Storage

        return S3Storage(parts.netloc, parts.path.strip("/"), on_read=on_read)
    raise CheckpointError(
        f"checkpoint root {root_uri!r} is neither s3://bucket/prefix nor file:///absolute/directory nor "
        "/absolute/directory; set TRUESTEP_CHECKPOINT_ROOT (or root_uri) to one of these"
    )


class HashingWriter:
    """A write-only stream that hashes and counts what passes through to `target`. Close it, also after an error.

    Large pieces, whole tensors, are hashed in a thread of their own while they are written, and no longer: torch.save
    hands over memory that it frees as soon as it may.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._digest = hashlib.sha256()
        self._bytes = 0
        self._hasher: ThreadPoolExecutor | None = None

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        if view.nbytes >= _HASHED_ASIDE_BYTES:
            self._hasher = self._hasher or ThreadPoolExecutor(1, "truestep-sha256")
            hashed = self._hasher.submit(self._digest.update, view)
            try:
                self._target.write(view)
            finally:
                # Also after an error: the view of torch.save's pickle keeps nothing alive, its memory goes next.
                hashed.result()
        else:
            self._target.write(view)
            self._digest.update(view)
        self._bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Nothing is buffered here."""

    def entry(self, path: str) -> FileEntry:
        return FileEntry(path=path, bytes=self._bytes, sha256=self._digest.hexdigest())

    def close(self) -> None:
        """End the thread."""
        if self._hasher is not None:
            self._hasher.shutdown()


class _EarlyDisk:
    """Writes to a file, and has the disk begin while the rest is still being hashed and written.

    The kernel would leave all of it to the last fsync, whose time would come on top. Close it, also after an error.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._unasked = 0
        self._thread: ThreadPoolExecutor | None = None
        self._asked: Future[None] | None = None

    def write(self, view: memoryview) -> None:
        self._file.write(view)
        self._unasked += view.nbytes
        if self._unasked >= _DISK_BYTES and (self._asked is None or self._asked.done()):
            self._raise_failure()
            self._thread = self._thread or ThreadPoolExecutor(1, "truestep-fdatasync")
            self._asked, self._unasked = self._thread.submit(os.fdatasync, self._file.fileno()), 0

    def sync(self) -> None:
        """Return once everything is on the disk. Raises `OSError`, also for what failed meanwhile."""
        self._file.flush()
        self._raise_failure()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """End the thread; before the file is closed, whose number another file might get."""
        if self._thread is not None:
            self._thread.shutdown()

    def _raise_failure(self) -> None:
        # The kernel says a failed write once, to whoever asks first: swallowed here, the last fsync would succeed.
        if self._asked is not None:
            self._asked.result()


def _check_content(stream: IO[bytes], expected: FileEntry, where: str, on_read: Callable[[int], object]) -> None:
    """Raise `CheckpointCorruptError` unless `stream`, read to its end, has the expected length and SHA-256."""
    digest, size = hashlib.sha256(), 0
    while chunk := stream.read(_COPY_BYTES):
        digest.update(chunk)
        size += len(chunk)
        on_read(len(chunk))
    require_entry(FileEntry(path=expected.path, bytes=size, sha256=digest.hexdigest()), expected, where)


def require_entry(found: FileEntry, expected: FileEntry, where: str) -> None:
    """Raise `CheckpointCorruptError` naming the file unless `found` is `expected`."""
    if found.bytes != expected.bytes:
        raise CheckpointCorruptError(f"{where} has {found.bytes} bytes, its manifest says {expected.bytes}")
    if found.sha256 != expected.sha256:
        raise CheckpointCorruptError(
            f"{where} has SHA-256 {found.sha256[:12]}..., its manifest says {expected.sha256[:12]}...: "
            "it was changed or damaged after it was written"
        )


class FileStorage:
    """A directory that every rank sees, such as FSx for Lustre. Durable: files and directories are fsynced."""

    def __init__(self, root: Path, *, on_read: Callable[[int], object] = _unwatched) -> None:
        self._root = root
        self._on_read = on_read

    @property
    def root_uri(self) -> str:
        return self._root.as_uri()

    def write_stream(self, path: str, write: Callable[[Any], Any]) -> FileEntry:
        target = self._prepare(path)
        temporary = _temporary(target)
        try:
            with (
                temporary.open("xb") as file,
                closing(_EarlyDisk(file)) as disk,
                closing(HashingWriter(disk)) as hashing,
            ):
                write(hashing)
                disk.sync()
                entry = hashing.entry(path)
            temporary.replace(target)
            _fsync_directory(target.parent)
        except OSError as error:
            raise StorageError(f"cannot write {target}: {error}; is the checkpoint volume full?") from error
        finally:
            temporary.unlink(missing_ok=True)
        return entry

    def write_once(self, path: str, content: bytes) -> None:
        target = self._prepare(path)
        temporary = _temporary(target)
        try:
            _write_durably(temporary, content)
            # A hard link, unlike a rename, fails where the name is taken: two writers cannot both win.
            os.link(temporary, target)
            _fsync_directory(target.parent)
        except FileExistsError:
            raise AlreadyWrittenError(f"{target} exists already and is never changed") from None
        except OSError as error:
            raise StorageError(f"cannot write {target}: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)

    def replace(self, path: str, content: bytes) -> None:
        target = self._prepare(path)
        try:
            # Ranks and people may be different users: whoever may read the root may read its orders and marks.
            replace_durably(target, content, readable=stat.S_IMODE(self._root.stat().st_mode) & 0o444)
        except OSError as error:
            raise StorageError(f"cannot write {target}: {error}") from error

    def read(self, path: str) -> bytes | None:
        try:
            return (self._root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(f"cannot read {self._root / path}: {error}") from error

    @contextmanager
    def open_verified(self, path: str, expected: FileEntry) -> Iterator[IO[bytes]]:
        source = self._root / path
        try:
            file = source.open("rb")
        except FileNotFoundError:
            raise CheckpointCorruptError(f"{source} is missing, its manifest lists it") from None
        except OSError as error:
            raise StorageError(f"cannot read {source}: {error}") from error
        with file:
            _check_content(file, expected, str(source), self._on_read)
            file.seek(0)
            yield file

    @contextmanager
    def staging(self, directory: str) -> Iterator[Path]:
        # Inside the checkpoint: a rename moves no bytes, and what a killed save left goes with the checkpoint's rest.
        staged = self._prepare(f"{directory}/.staging-{uuid.uuid4().hex}")
        try:
            staged.mkdir()
            yield staged
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def take(self, path: str, source: Path) -> FileEntry:
        target = self._prepare(path)
        try:
            # While the disk writes, the bytes that it writes are hashed from memory.
            with source.open("rb") as file, ThreadPoolExecutor(1, "truestep-fsync") as disk:
                synced = disk.submit(os.fsync, file.fileno())
                digest = hashlib.file_digest(file, "sha256")
                size = file.tell()
                synced.result()
            source.replace(target)
            for folder in target.relative_to(self._root).parents:
                _fsync_directory(self._root / folder)
        except OSError as error:
            raise StorageError(f"cannot write {target}: {error}") from error
        return FileEntry(path=path, bytes=size, sha256=digest.hexdigest())

    def fetch_verified(self, path: str, expected: FileEntry, target: Path) -> None:
        with self.open_verified(path, expected):
            target.symlink_to(self._root / path)

    def directories(self, prefix: str) -> list[str]:
        try:
            return sorted(
                entry.name for entry in self._root.iterdir() if entry.name.startswith(prefix) and entry.is_dir()
            )
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"cannot list {self._root}: {error}") from error

    def remove_file(self, path: str) -> None:
        with suppress(FileNotFoundError):
            (self._root / path).unlink()
            _fsync_directory((self._root / path).parent)

    def remove_directory(self, name: str) -> bool:
        directory = self._root / name
        try:
            entries = list(directory.iterdir())
            others = [entry for entry in entries if entry.name != REVOKED_NAME]
            if len(others) == len(entries):
                shutil.rmtree(directory)
                return True
            for entry in others:
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
            return bool(others)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StorageError(f"cannot remove {directory}: {error}") from error

    def _prepare(self, path: str) -> Path:
        target = self._root / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _fsync_directory(self._root)
        except OSError as error:
            raise StorageError(
                f"cannot create {target.parent}: {error}; the checkpoint root must be writable by every rank"
            ) from error
        return target


def replace_durably(target: Path, content: bytes, *, readable: int = 0) -> None:
    """Write `content` to `target` so that a crash leaves the old file or the new one, and neither torn.

    readable: permission bits that the file gets besides those that the umask leaves it.
    """
    temporary = _temporary(target)
    try:
        _write_durably(temporary, content)
        mode = stat.S_IMODE(temporary.stat().st_mode)
        if mode | readable != mode:
            temporary.chmod(mode | readable)
        temporary.replace(target)
        _fsync_directory(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
