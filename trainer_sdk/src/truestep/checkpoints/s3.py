"""Checkpoints in a bucket. boto3 is imported when the first storage is made, never at import of truestep."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from truestep.checkpoints.errors import (
    AlreadyWrittenError,
    CheckpointCorruptError,
    CheckpointError,
    MissingExtraError,
    StorageError,
)
from truestep.checkpoints.storage import HashingWriter, require_entry
from truestep.contract import FileEntry

PART_BYTES = 64 << 20
"""Size of a part of a multipart upload: 10,000 parts, S3's limit, hold 640 GB."""
_COPY_BYTES = 1 << 20


class S3Storage:
    """A prefix of a bucket. Objects appear whole by nature; ``write_once`` is a conditional put."""

    def __init__(self, bucket: str, prefix: str) -> None:
        try:
            import boto3
            import botocore.exceptions
        except ImportError as error:
            raise MissingExtraError(
                f"checkpoints on s3://{bucket} need boto3: pip install 'truestep[aws]', or keep them on file://"
            ) from error
        self._bucket, self._prefix = bucket, prefix
        self._failures: tuple[type[Exception], ...] = (
            botocore.exceptions.ClientError,
            botocore.exceptions.BotoCoreError,
        )
        # A session of its own: boto3's default session is not safe to share between threads.
        self._client: Any = boto3.session.Session().client("s3", region_name=os.environ.get("AWS_REGION"))

    @property
    def root_uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def write_stream(self, path: str, write: Callable[[IO[bytes]], None]) -> FileEntry:
        upload = _MultipartUpload(self._client, self._bucket, self._key(path))
        hashing: Any = HashingWriter(upload)
        try:
            write(hashing)
            upload.complete()
        except self._failures as error:
            upload.abort()
            raise self._storage_error("write", path, error) from error
        except BaseException:
            upload.abort()
            raise
        entry: FileEntry = hashing.entry(path)
        return entry

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
            content: bytes = self._client.get_object(Bucket=self._bucket, Key=self._key(path))["Body"].read()
        except self._failures as error:
            if _code(error) == "NoSuchKey":
                return None
            raise self._storage_error("read", path, error) from error
        return content

    @contextmanager
    def open_verified(self, path: str, expected: FileEntry) -> Iterator[IO[bytes]]:
        # torch.load seeks, an object's body does not: it goes through a temporary file and is hashed on the way.
        with tempfile.TemporaryFile() as file:
            digest, size = hashlib.sha256(), 0
            try:
                body = self._client.get_object(Bucket=self._bucket, Key=self._key(path))["Body"]
                while chunk := body.read(_COPY_BYTES):
                    file.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
            except self._failures as error:
                if _code(error) == "NoSuchKey":
                    raise CheckpointCorruptError(f"{self._uri(path)} is missing, its manifest lists it") from None
                raise self._storage_error("read", path, error) from error
            found = FileEntry(path=expected.path, bytes=size, sha256=digest.hexdigest())
            require_entry(found, expected, self._uri(path))
            file.seek(0)
            yield file

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

    def remove_directory(self, name: str) -> None:
        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._key(name) + "/"
            )
            for page in pages:
                keys = [{"Key": entry["Key"]} for entry in page.get("Contents", ())]
                if keys:
                    answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True})
                    if answer.get("Errors"):
                        raise StorageError(f"cannot remove {self._uri(name)}: {answer['Errors'][0]}")
        except self._failures as error:
            raise self._storage_error("remove", name, error) from error

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
        self._client.complete_multipart_upload(
            **self._target, UploadId=self._upload_id, MultipartUpload={"Parts": self._parts}
        )
        self._upload_id = ""

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


def _status(error: Exception) -> int:
    response: dict[str, Any] = getattr(error, "response", {})
    status: int = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status


def _code(error: Exception) -> str:
    response: dict[str, Any] = getattr(error, "response", {})
    code: str = response.get("Error", {}).get("Code", "")
    return code
