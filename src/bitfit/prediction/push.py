"""Push: a delta and its model card to the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path

from ..delta.delta import Delta
from ..delta.hub import FILE, MARK, REPOSITORY, endpoint, hub_errors
from ..errors import UsageError
from .card import GENERATED, hub_card

CARD = "README.md"


def push(
    delta: Delta | str | os.PathLike[str], repository: str, private: bool = False, message: str | None = None
) -> str:
    """Upload a delta to a repository of the hub, which is created if it does not exist; returns its address.

    The token comes from HF_TOKEN or `hf auth login`. A model card is uploaded with the delta, unless the repository has
    one that bitfit did not write.
    """
    name = repository.removeprefix(MARK)
    if not REPOSITORY.fullmatch(name) or ".." in name:
        raise UsageError(f"{repository}: is not the name of a repository; write owner/name")
    loaded = delta if isinstance(delta, Delta) else Delta.load(Path(delta))
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    token = get_token()
    if token is None:
        raise UsageError("push: no token for the hub; set HF_TOKEN, or run: hf auth login")
    api = HfApi(endpoint=endpoint(), token=token)
    with hub_errors(name):
        address = str(api.create_repo(name, private=private or None, exist_ok=True))
        files = {FILE: loaded.encode()}
        if not _has_custom_card(api, name):
            files[CARD] = hub_card(loaded, name).encode()
        operations = [CommitOperationAdd(path, content) for path, content in files.items()]
        text = message or f"{loaded.meta.task} delta of bitfit"
        api.create_commit(name, operations, commit_message=text, repo_type="model")
    return address


def _has_custom_card(api: object, name: str) -> bool:
    """Whether a repository has a card that bitfit did not write."""
    from huggingface_hub import HfApi

    assert isinstance(api, HfApi)
    if not api.file_exists(name, CARD):
        return False
    text = Path(api.hf_hub_download(name, CARD)).read_text(encoding="utf-8", errors="replace")
    return GENERATED not in text and bool(text.strip())
