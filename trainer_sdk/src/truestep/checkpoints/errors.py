"""Errors of checkpoints and resume.

TruestepError
└── CheckpointError             every error of this package
    ├── MissingExtraError       an optional dependency is not installed; names the extra
    ├── StorageError            the storage refused or lost something
    ├── AlreadyWrittenError     a file that is written once exists already
    ├── CheckpointWriteError    a save failed on some rank; raised on every rank
    ├── CheckpointCorruptError  bytes or weights differ from the manifest
    └── ResumeError             nothing to start from; says what to do
        ├── TombstoneError      an alarm ended this run and no directive answers it
        └── NoUsableCheckpointError  every candidate was refused
"""

from __future__ import annotations

from truestep.contract import TruestepError


class CheckpointError(TruestepError):
    """Base of the errors of checkpoints and resume."""


class MissingExtraError(CheckpointError, ImportError):
    """An optional dependency is not installed. The message names the extra that brings it."""


class StorageError(CheckpointError):
    """The storage refused an operation, or a file that a manifest lists is not there."""


class AlreadyWrittenError(CheckpointError):
    """A file that is written exactly once exists already."""


class CheckpointWriteError(CheckpointError):
    """A save failed on at least one rank; every rank raises it, and the checkpoint does not exist."""


class CheckpointCorruptError(CheckpointError):
    """A file's bytes or the loaded weights differ from what the manifest says. The message names the file."""


class ResumeError(CheckpointError):
    """The run cannot start from where it was told to. Raised on every rank."""


class TombstoneError(ResumeError):
    """An alarm ended the run that wrote these checkpoints, and no directive issued since says from which to resume."""


class NoUsableCheckpointError(ResumeError):
    """Every candidate was refused; the message lists each with its reason."""
