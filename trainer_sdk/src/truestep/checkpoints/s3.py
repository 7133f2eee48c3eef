"""Checkpoints in a bucket. boto3 is imported when the first storage is made, never at import of truestep."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from truestep.checkpoints.errors import (
    AlreadyWrittenError,
    CheckpointCorruptError,
    CheckpointError,
    MissingExtraError,
    StorageError,
)
from truestep.checkpoints.storage import HashingWriter, require_entry
from truestep.contract import REVOKED_NAME, FileEntry

PART_BYTES = 64 << 20
"""Size of a part of a multipart upload: 10,000 parts, S3's limit, hold 640 GB."""
_COPY_BYTES = 1 << 20
REQUEST_ATTEMPTS = 10
"""With botocore's growing waits about a minute: a throttled bucket must not end a training."""
READ_ATTEMPTS = 5
READ_TIMEOUT_SECONDS = 60.0


class S3Storage:
    """A prefix of a bucket. Objects appear whole by nature; ``write_once`` is a conditional put."""

    def __init__(self, bucket: str, prefix: str, *, on_read: Callable[[int], object] = lambda _: None) -> None:
        try:
            import boto3
            import botocore.config
            import botocore.exceptions
        except ImportError as error:
            raise MissingExtraError(
                f"checkpoints on s3://{bucket} need boto3: pip install 'truestep[aws]', or keep them on file://"
            ) from error
        self._bucket, self._prefix, self._on_read = bucket, prefix, on_read
        self._failures: tuple[type[Exception], ...] = (
            botocore.exceptions.ClientError,
            botocore.exceptions.BotoCoreError,
        )
        self._cut_off: tuple[type[Exception], ...] = (
            botocore.exceptions.IncompleteReadError,
            botocore.exceptions.ResponseStreamingError,
            botocore.exceptions.ReadTimeoutError,
        )
        # A session of its own: boto3's default session is not safe to share between threads.
        self._client: Any = boto3.session.Session().client(
            "s3", region_name=os.environ.get("AWS_REGION"), config=botocore.config.Config(**_patience(os.environ))
        )

    @property
    def root_uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def write_stream(self, path: str, write: Callable[[Any], Any]) -> FileEntry:
        upload = _MultipartUpload(self._client, self._bucket, self._key(path))
        try:
            with closing(HashingWriter(upload)) as hashing:
                write(hashing)
                upload.complete()
                return hashing.entry(path)
        except self._failures as error:
            upload.abort()
            raise self._storage_error("write", path, error) from error
        except BaseException:
            upload.abort()
            raise

    def write_once(self, path: str, content: bytes) -> None:
        try:
            self._client.put_object(Bucket=self._bucket, Key=self._key(path), Body=content, IfNoneMatch="*")
        except self._failures as error:
            # 409: another conditional put on this key was in flight and won or may yet win.
            if _status(error) in (409, 412):
                # A put whose answer was lost is retried by botocore and then meets its own object.
                if self.read(path) == content:
                    return
                raise AlreadyWrittenError(f"{self._uri(path)} exists already and is never changed") from None
            raise self._storage_error("write", path, error) from error

    def replace(self, path: str, content: bytes) -> None:
        try:
            self._client.put_object(Bucket=self._bucket, Key=self._key(path), Body=content)
        except self._failures as error:
            raise self._storage_error("write", path, error) from error

    def read(self, path: str) -> bytes | None:
        try:
            return b"".join(self._chunks(path))
        except self._failures as error:
            if _is_absent(error):
                return None
            raise self._storage_error("read", path, error) from error

    @contextmanager
    def open_verified(self, path: str, expected: FileEntry) -> Iterator[IO[bytes]]:
        # torch.load seeks, an object's body does not: it goes through a temporary file and is hashed on the way.
        with tempfile.TemporaryFile() as file:
            self._download(path, expected, file)
            file.seek(0)
            yield file

    @contextmanager
    def staging(self, directory: str) -> Iterator[Path]:  # noqa: ARG002
        with tempfile.TemporaryDirectory(prefix="truestep-") as staged:
            yield Path(staged)

    def take(self, path: str, source: Path) -> FileEntry:
        def stream(target: HashingWriter) -> None:
            with source.open("rb") as file:
                while chunk := file.read(_COPY_BYTES):
                    target.write(chunk)

        return self.write_stream(path, stream)

    def fetch_verified(self, path: str, expected: FileEntry, target: Path) -> None:
        with target.open("xb") as file:
            self._download(path, expected, file)

    def _download(self, path: str, expected: FileEntry, file: IO[bytes]) -> None:
        digest, size = hashlib.sha256(), 0
        try:
            for chunk in self._chunks(path):
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                self._on_read(len(chunk))
        except self._failures as error:
            if _is_absent(error):
                raise CheckpointCorruptError(f"{self._uri(path)} is missing, its manifest lists it") from None
            raise self._storage_error("read", path, error) from error
        found = FileEntry(path=expected.path, bytes=size, sha256=digest.hexdigest())
        require_entry(found, expected, self._uri(path))

    def _chunks(self, path: str) -> Iterator[bytes]:
        """An object's content; a connection that breaks off is taken up again where it broke."""
        target = {"Bucket": self._bucket, "Key": self._key(path)}
        answer = self._client.get_object(**target)
        total, position, left = answer["ContentLength"], 0, READ_ATTEMPTS
        while position < total:
            try:
                while chunk := answer["Body"].read(_COPY_BYTES):
                    position += len(chunk)
                    yield chunk
                if position == total:
                    return
            except self._cut_off:
                left -= 1
                if left == 0:
                    raise
            # IfMatch: the rest of another object must not be glued to the beginning of this one.
            answer = self._client.get_object(**target, Range=f"bytes={position}-", IfMatch=answer["ETag"])

    def directories(self, prefix: str) -> list[str]:
        base = self._key("")
        names: list[str] = []
        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=base + prefix, Delimiter="/"
            )
            for page in pages:
                names.extend(entry["Prefix"][len(base) : -1] for entry in page.get("CommonPrefixes", ()))
        except self._failures as error:
            raise self._storage_error("list", prefix, error) from error
        return sorted(names)

    def remove_file(self, path: str) -> None:
        try:
            self._client.delete_object(Bucket=self._bucket, Key=self._key(path))
        except self._failures as error:
            raise self._storage_error("remove", path, error) from error

    def remove_directory(self, name: str) -> bool:
        removed = False
        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._key(name) + "/"
            )
            for page in pages:
                # The pods' policy keeps them from a mark: naming it would fail the request.
                mark = self._key(f"{name}/{REVOKED_NAME}")
                keys = [{"Key": entry["Key"]} for entry in page.get("Contents", ()) if entry["Key"] != mark]
                if keys:
                    removed = True
                    answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True})
                    if answer.get("Errors"):
                        raise StorageError(f"cannot remove {self._uri(name)}: {answer['Errors'][0]}")
        except self._failures as error:
            raise self._storage_error("remove", name, error) from error
        return removed

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix else path

    def _uri(self, path: str) -> str:
        return f"s3://{self._bucket}/{self._key(path)}"

    def _storage_error(self, verb: str, path: str, error: Exception) -> CheckpointError:
        return StorageError(
            f"cannot {verb} {self._uri(path)}: {error}; check the bucket's name and region and the pod's role"
        )


class _MultipartUpload:
    """Collects a stream into parts; small streams become one put. Nothing is visible before `complete`."""

    def __init__(self, client: Any, bucket: str, key: str) -> None:
        self._client = client
        self._target = {"Bucket": bucket, "Key": key}
        self._buffer = bytearray()
        self._upload_id = ""
        self._parts: list[dict[str, Any]] = []
        self._sent = 0

    def write(self, content: memoryview) -> None:
        self._buffer += content
        while len(self._buffer) >= PART_BYTES:
            self._send(bytes(self._buffer[:PART_BYTES]))
            del self._buffer[:PART_BYTES]

    def complete(self) -> None:
        if not self._upload_id:
            self._client.put_object(**self._target, Body=bytes(self._buffer))
            return
        if self._buffer:
            self._send(bytes(self._buffer))
        try:
            self._client.complete_multipart_upload(
                **self._target, UploadId=self._upload_id, MultipartUpload={"Parts": self._parts}
            )
        except Exception as error:
            # An answer that was lost is asked for again, and then there is no such upload any more: it is complete.
            if _code(error) != "NoSuchUpload" or not self._is_there():
                raise
        self._upload_id = ""

    def _is_there(self) -> bool:
        found = self._client.head_object(**self._target)
        etag: str = found["ETag"].strip('"')
        return bool(found["ContentLength"] == self._sent) and etag.endswith(f"-{len(self._parts)}")

    def abort(self) -> None:
        if self._upload_id:
            # The failure that led here counts; parts left behind are the bucket's lifecycle rule's to expire.
            with suppress(Exception):
                self._client.abort_multipart_upload(**self._target, UploadId=self._upload_id)
            self._upload_id = ""

    def _send(self, part: bytes) -> None:
        if not self._upload_id:
            self._upload_id = self._client.create_multipart_upload(**self._target)["UploadId"]
        number = len(self._parts) + 1
        answer = self._client.upload_part(**self._target, UploadId=self._upload_id, PartNumber=number, Body=part)
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"]})
        self._sent += len(part)


def _patience(environ: Mapping[str, str]) -> dict[str, Any]:
    """Settings of the client; what the environment says about retries wins."""
    said = "AWS_MAX_ATTEMPTS" in environ or "AWS_RETRY_MODE" in environ
    retries = {} if said else {"retries": {"mode": "standard", "total_max_attempts": REQUEST_ATTEMPTS}}
    return {"connect_timeout": 10, "read_timeout": READ_TIMEOUT_SECONDS, **retries}


def _status(error: Exception) -> int:
    response: dict[str, Any] = getattr(error, "response", {})
    status: int = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status


def _is_absent(error: Exception) -> bool:
    """404 alone: the answer's text was lost."""
    return _code(error) in ("NoSuchKey", "404")


def _code(error: Exception) -> str:
    response: dict[str, Any] = getattr(error, "response", {})
    code: str = response.get("Error", {}).get("Code", "")
    return code
