"""Errors of the contract package.

TruestepError                every error that truestep raises on purpose
└── ContractError            a document does not match its schema; names the field
    └── UnknownVersionError  the document's major version is newer or older than this code accepts
"""

from __future__ import annotations


class TruestepError(Exception):
    """Base of every error that truestep raises on purpose."""


class ContractError(TruestepError):
    """A document does not match its schema. The message names the field and what was expected."""


class UnknownVersionError(ContractError):
    """The document's ``schema_version`` is one that this code does not accept; upgrade the older side."""
