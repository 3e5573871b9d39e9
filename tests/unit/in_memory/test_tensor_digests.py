"""Digests of tensors: their values, which changes they show, and that those of many are those of each."""

from __future__ import annotations

import random
import weakref

import pytest
import torch

from elastipod.in_memory import tensor_digests
from elastipod.in_memory.tensor_digests import as_bytes, digests_of_tensors

WEIGHTS = (torch.randint(1, 1 << 62, (1024,), generator=torch.Generator().manual_seed(1)) * 2 + 1).tolist()
WORD = 8  # bytes
ROW = 1024  # words


def digest_of(tensor: torch.Tensor) -> str:
    (found,) = digests_of_tensors([tensor])
    return found


def by_the_word(tensor: torch.Tensor) -> str:
    """The definition, word for word: as earlier versions compute it, which may be in one world with this one."""
    raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    words = [int.from_bytes(raw[at : at + WORD], "little") for at in range(0, len(raw), WORD)]
    whole = len(raw) // (ROW * WORD) * ROW
    total = sum(word * WEIGHTS[at % ROW] if at < whole else word for at, word in enumerate(words))
    return f"{total % (1 << 64):016x}"


def random_bytes(count: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


SIZES = [0, 1, 7, 8, 9, 8191, 8192, 8193, 3 * 8192, 3 * 8192 + 8, 37 * 8192 + 4003, 32 * 8192]


def test_the_digests_of_many_tensors_are_those_of_each_word_for_word() -> None:
    tensors = [random_bytes(size, seed=size) for size in SIZES]
    assert digests_of_tensors(tensors) == [by_the_word(each) for each in tensors]
    assert digests_of_tensors([]) == []
    beats: list[str] = []
    digests_of_tensors(tensors, lambda: beats.append("one"))
    assert len(beats) == len(tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_digest_is_that_of_the_bytes_of_any_type_and_place(dtype: torch.dtype) -> None:
    many = torch.randn(70, 40, generator=torch.Generator().manual_seed(4)).to(dtype)
    found = digests_of_tensors([many, many.t(), many[1:, 3:], many[0, 1:4], many[0, 0]])
    assert found == [by_the_word(each) for each in (many, many.t(), many[1:, 3:], many[0, 1:4], many[0, 0])]


def test_the_copies_of_many_tensors_are_not_held_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of weights and moments in channels_last; on an accelerator they would be gigabytes."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal most
        found = as_bytes(tensor)
        alive.add(found)
        most = max(most, len(alive))
        return found

    monkeypatch.setattr(tensor_digests, "as_bytes", noted)
    tensors = [random_bytes(64 * 1024, seed=seed).view(256, 256).t() for seed in range(20)]
    assert digests_of_tensors(tensors) == [by_the_word(each) for each in tensors]
    assert most <= 2


def test_more_tensors_than_are_looked_at_together_have_their_digests() -> None:
    tensors = [torch.tensor(float(number)) for number in range(600)]
    assert digests_of_tensors(tensors) == [by_the_word(each) for each in tensors]


def test_a_digest_sees_every_bit_that_is_another() -> None:
    """A single one changes it by an odd number times a power of two, which is no multiple of 2**64."""
    raw = random_bytes(8192 + 19)
    expected, chosen = digest_of(raw), random.Random(5)
    places = [(at, bit) for at in chosen.sample(range(8192), 40) for bit in range(8)]
    places += [(at, bit) for at in range(8192, len(raw)) for bit in range(8)]
    changed = [raw.clone() for _ in places]
    for each, (at, bit) in zip(changed, places, strict=True):
        each[at] ^= 1 << bit
    found = digests_of_tensors(changed)
    assert expected not in found
    assert len(found) == 8 * 59


def test_a_digest_sees_two_words_of_a_row_that_have_changed_places() -> None:
    words = torch.randint(-(1 << 62), 1 << 62, (ROW,), generator=torch.Generator().manual_seed(6))
    chosen = random.Random(7)
    swapped = [words.clone() for _ in range(300)]
    for each in swapped:
        one, other = chosen.sample(range(ROW), 2)
        each[[one, other]] = each[[other, one]]
    assert digest_of(words) not in digests_of_tensors(swapped)


def test_a_digest_sees_errors_of_opposite_sign_in_one_tensor() -> None:
    words = torch.arange(5000, dtype=torch.int64)
    moved = words.clone()
    moved[7] += 1
    moved[4000] -= 1
    assert moved.sum() == words.sum()
    assert len(set(digests_of_tensors([words, moved, words[:4999], words.flip(0)]))) == 4
    assert digest_of(words) == digest_of(words.clone())


def test_what_other_tensors_hold_does_not_matter() -> None:
    tensors = [random_bytes(size, seed=size) for size in SIZES]
    before = digests_of_tensors(tensors)
    tensors[4] ^= 255
    after = digests_of_tensors(tensors)
    assert [one == other for one, other in zip(before, after, strict=True)] == [at != 4 for at in range(len(SIZES))]


def test_bytes_of_a_transposed_tensor_are_those_of_its_elements_in_order() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3).t()
    assert as_bytes(tensor).view(torch.float32).tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


def test_bytes_of_a_tensor_are_its_own_memory_where_that_is_whole_and_aligned() -> None:
    whole = torch.arange(8, dtype=torch.int32)
    assert as_bytes(whole).data_ptr() == whole.data_ptr()
    assert as_bytes(whole).tolist()[:5] == [0, 0, 0, 0, 1]
    assert as_bytes(whole[2:]).data_ptr() == whole[2:].data_ptr()
    for copied in (whole[1:], whole[::2], torch.arange(6).view(2, 3).t()):
        raw = as_bytes(copied)
        assert raw.data_ptr() != copied.data_ptr()
        assert raw.view(copied.dtype).tolist() == copied.flatten().tolist()
    assert as_bytes(torch.ones(1, requires_grad=True)).requires_grad is False
    assert as_bytes(torch.tensor(1, dtype=torch.int16)).tolist() == [1, 0]
