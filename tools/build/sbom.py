"""The CycloneDX bill of materials inside the wheel (PEP 770: dist-info/sboms/).

Its pedigree names the base release as ancestor and carries each patch in full, so that a
scanner, or a reader with nothing but the installed files, can tell what we changed.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence

from tools.build.patch import Patch
from tools.build.pins import Base, Label

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "vllm-bidir/sbom")
_TYPES = {"backports": "backport", "fixes": "unofficial", "hooks": "unofficial"}


def make_sbom(
    base: Base, label: Label, patches: Sequence[Patch], overlay_sha256: str, epoch: int
) -> bytes:
    """A CycloneDX 1.6 document; the same inputs give the same bytes.

    `overlay_sha256` identifies the overlaid files as a whole; `epoch` is the build's timestamp
    in seconds.
    """
    identity = "|".join(
        [label.version, base.sha256, overlay_sha256, *(patch.sha256 for patch in patches)]
    )
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, identity)}",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch)),
            "tools": {"components": [{"type": "application", "name": "vllm-bidir tools.build"}]},
            "component": {
                "type": "library",
                "bom-ref": "vllm",
                "name": label.name,
                "version": label.version,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "purl": f"pkg:pypi/{label.name}@{label.version.replace('+', '%2B')}",
                "pedigree": {
                    "ancestors": [
                        {
                            "type": "library",
                            "bom-ref": "base",
                            "name": base.name,
                            "version": base.version,
                            "purl": f"pkg:pypi/{base.name}@{base.version}?file_name={base.file}",
                            "hashes": [{"alg": "SHA-256", "content": base.sha256}],
                        }
                    ],
                    "patches": [_patch(patch) for patch in patches],
                    "notes": f"sha256 over the overlaid files: {overlay_sha256}",
                },
            },
        },
    }
    return (json.dumps(document, indent=1) + "\n").encode("utf-8")


def _patch(patch: Patch) -> dict[str, object]:
    return {
        "type": _TYPES.get(patch.name.split("/", 1)[0], "unofficial"),
        "diff": {"text": {"contentType": "text/x-diff", "content": patch.raw.decode("utf-8")}},
        "resolves": [
            {
                "type": "enhancement" if patch.name.startswith("hooks/") else "defect",
                "id": patch.name,
                "name": patch.headers.get("Subject", patch.name),
                "description": patch.headers.get("Why", ""),
            }
        ],
    }
