"""Metadata and headers that were damaged, or made up: refused in words, quickly, in little memory.

What is accepted must keep every promise of the format, by a judge that shares no code with it.
"""

from __future__ import annotations

import json
import random
import struct
import time
import tracemalloc

import pytest
from support.ckpt_metadata import assert_sound, example, told_v1
from support.ckpt_mutations import mutated, mutated_json

from fsdpcore.checkpoint.format.header import TensorEntry, build_header, parse_header, tensor_bytes
from fsdpcore.checkpoint.format.marker import Marker
from fsdpcore.checkpoint.format.metadata import Metadata
from fsdpcore.core.errors import CorruptCheckpointError

# Of one input of a few KB, on a machine that does other things too; it takes well under 10 ms.
SECONDS = 5.0
# What Python needs for the smallest JSON values, such as "[]," in 3 bytes: 56 for an empty list, as
# much again for the list's place in others and while it is read.
TIMES, CONSTANT = 100, 256 << 10

HEADER = build_header(
    [
        TensorEntry("a", "F32", (3, 5), 60),
        TensorEntry("bé", "BF16", (2, 2), 8),
        TensorEntry("", "U8", (0, 4), 0),
        TensorEntry("fsdpcore.checksums", "U8", (3, 8), 24),
    ],
    {"format": "fsdpcore.checkpoint", "save_id": "5f0c", "rank": "3"},
)
FILE_SIZE = len(HEADER) + 92


def _metadata_inputs(rng):
    second = example().to_bytes()
    first = json.dumps(told_v1(example())).encode()
    while True:
        valid = rng.choice((first, second))
        told = json.loads(valid)
        if rng.random() < 0.5:
            yield mutated(valid, rng)
        else:
            yield mutated_json(told, rng).encode(errors="surrogatepass")


def _header_inputs(rng):
    told = json.loads(HEADER[8:])
    while True:
        kind = rng.random()
        if kind < 0.4:
            yield mutated(HEADER, rng), FILE_SIZE
        elif kind < 0.8:
            text = mutated_json(told, rng).encode(errors="surrogatepass").ljust(len(HEADER) - 8)
            yield struct.pack("<Q", len(text)) + text, len(text) + 8 + 92
        else:
            length = rng.choice((0, 1, 2**63, 2**64 - 1, 10**8, 10**8 + 1, rng.getrandbits(64)))
            yield struct.pack("<Q", length) + HEADER[8:], rng.choice((0, 7, FILE_SIZE, 2**62))


def _check_metadata(data):
    read = Metadata.from_bytes(data)
    assert_sound(read, limit=1000)
    assert Metadata.from_bytes(read.to_bytes()) == read


def _check_header(data, size):
    header = parse_header(data, size)
    at = header.data_start
    for entry in header.entries:
        assert entry.offset == at
        assert entry.nbytes == tensor_bytes(entry.code, entry.shape)
        at += entry.nbytes
    assert at == size
    entries = [entry[:4] for entry in header.entries]
    again = build_header([TensorEntry(*entry) for entry in entries], header.metadata)
    assert [entry[:4] for entry in parse_header(again, len(again) + at - header.data_start).entries]


def _accepted(parse, *arguments):
    """Whether an input was accepted; it took bounded time and memory either way."""
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    began = time.perf_counter()
    try:
        parse(*arguments)
        message = ""
    except CorruptCheckpointError as error:
        message = str(error)
    took = time.perf_counter() - began
    _, peak = tracemalloc.get_traced_memory()
    assert took < SECONDS
    assert peak - before <= TIMES * len(arguments[0]) + CONSTANT
    assert message.isprintable()
    assert message == "" or 10 < len(message) < 10_000
    return message == ""


def _campaign(count, seed):
    rng = random.Random(seed)
    accepted = 0
    metadata, headers = _metadata_inputs(rng), _header_inputs(rng)
    _check_metadata(example().to_bytes())  # so that caches are filled
    tracemalloc.start()
    try:
        for number in range(count):
            if number % 2:
                data = next(metadata)
                if _accepted(Metadata.from_bytes, data):
                    accepted += 1
                    _check_metadata(data)
            else:
                data, size = next(headers)
                if _accepted(parse_header, data, size):
                    accepted += 1
                    _check_header(data, size)
    finally:
        tracemalloc.stop()
    return accepted


def test_damaged_inputs_are_refused_or_sound():
    accepted = _campaign(1000, seed=1)
    assert 0 < accepted < 500  # the damage is neither always harmless nor always noticed


@pytest.mark.campaign
def test_a_hundred_thousand_damaged_inputs():
    accepted = sum(_campaign(10_000, seed) for seed in range(2, 12))
    assert 0 < accepted < 50_000


def test_damaged_markers_are_refused():
    data = Marker.of(30, "5f0c", b"{}", {"loss": 1.5}).to_bytes()
    rng = random.Random(5)
    for _ in range(1000):
        damaged = mutated(data, rng)
        if damaged != data:
            with pytest.raises(CorruptCheckpointError):
                Marker.from_bytes(damaged)
