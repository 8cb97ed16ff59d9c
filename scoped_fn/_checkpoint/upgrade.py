"""Documents of older schemas, step by step to the newest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from scoped_fn._checkpoint.plain import Document
from scoped_fn._checkpoint.unfit import Unfit, refusal

# Version -> what makes a document of it one of the next version. There is one version so far.
UPGRADES: Mapping[int, Callable[[Document], Document]] = MappingProxyType({})


def upgraded(
    document: Document, schema: int, *, newest: int, upgrades: Mapping[int, Callable[[Document], Document]]
) -> Document:
    """Returns a document of the newest schema.

    Args:
        document: The document as it is in the file.
        schema: Its schema.
        newest: The newest one.
        upgrades: Version -> the function that gives a document of the next version.

    Raises:
        Unfit: There is no way from its schema to the newest.
    """
    for version in range(schema, newest):
        if version not in upgrades:
            raise refusal(f"a schema that can be brought to {newest}", schema)
        try:
            document = upgrades[version](document)
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # a document of another form than it says
            raise Unfit(f"a document of schema {version}", f"'{type(error).__name__}: {error}'") from None
    return document
