"""Content that is hashed anyway is written without CRCs; nobody else's files lose theirs."""

from __future__ import annotations

import io
import threading
import zipfile

import pytest
import torch

from truestep.serialization import save_unchecked

VALUE = {"weight": torch.arange(1000.0), "step": 3}


def test_torch_load_reads_it_and_the_rest_is_as_torch_save_writes_it() -> None:
    unchecked, plain = io.BytesIO(), io.BytesIO()
    save_unchecked(VALUE, unchecked)
    torch.save(VALUE, plain)
    unchecked.seek(0)
    loaded = torch.load(unchecked, weights_only=True)
    assert torch.equal(loaded["weight"], VALUE["weight"])
    assert loaded["step"] == 3
    assert len(unchecked.getvalue()) == len(plain.getvalue())
    with zipfile.ZipFile(unchecked) as archive:
        assert archive.testzip() is not None, "the CRCs were computed after all"


class Meanwhile(io.BytesIO):
    """Has another thread save with torch.save while this stream is being written to."""

    def __init__(self) -> None:
        super().__init__()
        self.others = io.BytesIO()

    def write(self, content: object) -> int:
        if not self.others.getvalue():
            thread = threading.Thread(target=torch.save, args=(VALUE, self.others))
            thread.start()
            thread.join()
        return super().write(content)  # type: ignore[arg-type]


def test_what_another_thread_saves_meanwhile_keeps_its_crcs() -> None:
    stream = Meanwhile()
    save_unchecked(VALUE, stream)
    with zipfile.ZipFile(stream.others) as archive:
        assert archive.testzip() is None


def test_the_setting_is_put_back_after_an_error_and_the_users_own_choice_stays() -> None:
    class Full(io.BytesIO):
        def write(self, content: object) -> int:
            raise OSError("no space left on device")

    for chosen in (False, True):
        torch.serialization.set_crc32_options(chosen)
        with pytest.raises((OSError, RuntimeError)):
            save_unchecked(VALUE, Full())
        assert torch.serialization.get_crc32_options() is chosen
