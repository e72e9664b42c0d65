"""Chunk keys are the same everywhere, and differ with any part of the identity."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.keys.prefix_hash import CHUNK_KEY_BYTES, PrefixHasher, canonical_bytes
from lmcache_connector.keys.request_keys import MultimodalSpan, RequestIdentity, RequestKeys

CHUNK = 4
TOKENS = list(range(100, 112))
GOLDEN = """
import sys
from lmcache_connector.keys.prefix_hash import PrefixHasher
hasher = PrefixHasher({"namespace": "n", "weights": "w"}, 4, b"secret" if sys.argv[1:] else None)
for key in hasher.extend(hasher.root_key({"salt": "s", "lora": None}), range(8), [b"", b"x"]):
    print(key.hex())
"""
GOLDEN_KEYS = [
    "2ef6666ef59d5a1e30aa5521490a354608f6f08e7c766552a195e2a81c382b76",
    "e3a56167b94e83c2aa22f34df80f8e7cec58ca9000dca8204b43934f0c98a6c9",
]
GOLDEN_KEYED = [
    "6ef121e17f401d8877b6c833e36f70881434c2b2f0d806dfe9bc4e598d7196df",
    "80461298cd4cbdabade39b96387ea2562924bbda1a08bdb11e9dcd4905feccf0",
]
# Keys of the same chunks by version 1, whose roots named no version of the identity.
KEYS_OF_VERSION_1 = [
    "ebacc38a4d20db774b473d96d88722ae347a205dab155abf4411554e85a6b446",
    "c16516024709bae973a4dc044e9265ad8e226fb419315b3d2cb889c3aa051ea3",
]

ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def keys(
    tokens: list[int] = TOKENS,
    model: dict[str, Any] | None = None,
    chunk: int = CHUNK,
    secret: bytes | None = None,
    **identity: Any,
) -> list[bytes]:
    hasher = PrefixHasher(model or {"namespace": "a", "weights": "w"}, chunk, secret)
    request = RequestKeys(hasher, RequestIdentity(**identity))
    request.extend(tokens)
    return list(request.keys)


def in_a_process(seed: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", GOLDEN, *arguments],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_keys_are_the_same_in_every_process_and_never_change() -> None:
    assert in_a_process("1") == in_a_process("2") == GOLDEN_KEYS
    assert in_a_process("3", "keyed") == GOLDEN_KEYED


def test_instances_of_two_identity_versions_miss_each_other() -> None:
    """In version 1, only a label or an audit told changed weights apart."""
    model = {"namespace": "n", "weights": "w"}
    roots = [
        {"salt": "s", "lora": None},
        {"salt": "s", "lora": None, "epoch": ""},
        {"salt": "s", "lora": None, "weights": ""},
    ]
    old, new = PrefixHasher(model, CHUNK), PrefixHasher(model, CHUNK)
    old._model_root = canonical_bytes({"format": 1, "chunk_size": CHUNK, "model": model})
    before, after = (
        [list(each.extend(each.root_key(root), range(8), [b"", b"x"])) for root in roots]
        for each in (old, new)
    )
    assert [key.hex() for key in before[0]] == KEYS_OF_VERSION_1
    assert not {key for keys in before for key in keys} & {key for keys in after for key in keys}


@pytest.mark.parametrize(
    "change",
    [
        {"cache_salt": "t"},
        {"cache_salt": ""},
        {"lora": "adapter"},
        {"weights": "1"},
        {"model": {"namespace": "b", "weights": "w"}},
        {"model": {"namespace": "a", "weights": "v"}},
        {"secret": b"k"},
        {"secret": b"l"},
        {"multimodal": (MultimodalSpan("image", 0, 12),)},
        {"embeds_digest": lambda start, end: f"{start}"},
    ],
    ids=lambda change: f"{next(iter(change))}={str(next(iter(change.values())))[:12]}",
)
def test_any_difference_changes_all_keys(change: dict[str, Any]) -> None:
    assert not set(keys()) & set(keys(**change))


@given(tokens=ids, position=st.integers(0, 39), other=st.integers(0, 2**32 - 1))
def test_one_token_changes_its_chunk_and_all_after_it(
    tokens: list[int], position: int, other: int
) -> None:
    if position >= len(tokens) or tokens[position] == other:
        return
    changed = [*tokens[:position], other, *tokens[position + 1 :]]
    before, after = keys(tokens), keys(changed)
    assert before[: position // CHUNK] == after[: position // CHUNK]
    assert not set(before[position // CHUNK :]) & set(after[position // CHUNK :])


@given(tokens=ids, cuts=st.lists(st.integers(0, 40), max_size=6))
def test_keys_of_tokens_in_pieces_are_the_same(tokens: list[int], cuts: list[int]) -> None:
    identity = RequestIdentity(multimodal=(MultimodalSpan("i", 3, 9),), cache_salt="s")
    pieces = RequestKeys(PrefixHasher({}, CHUNK), identity)
    for cut in [*sorted(cuts), len(tokens)]:
        pieces.extend(tokens[:cut])
    whole = RequestKeys(PrefixHasher({}, CHUNK), identity)
    whole.extend(tokens)
    assert pieces.keys == whole.keys
    assert len(whole.keys) == len(tokens) // CHUNK
    assert pieces.num_hashed_tokens == len(whole.keys) * CHUNK
    assert all(len(key) == CHUNK_KEY_BYTES for key in whole.keys)


def test_extras_of_a_chunk_cannot_collide_with_later_tokens() -> None:
    hasher = PrefixHasher({}, 1)
    root = hasher.root_key({})
    with_extra = list(hasher.extend(root, [1], [b"\x02\0\0\0"]))
    with_tokens = list(hasher.extend(root, [1, 2]))
    assert not set(with_extra) & set(with_tokens)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_ids_outside_u32_are_refused(token: int) -> None:
    hasher = PrefixHasher({}, 1)
    with pytest.raises(OverflowError):
        list(hasher.extend(hasher.root_key({}), [token]))


def test_a_roots_digest_differs_where_keys_do_and_hides_them() -> None:
    root = {"weights": "w"}
    plain = PrefixHasher({"namespace": "a"}, CHUNK)
    others = [
        PrefixHasher({"namespace": "b"}, CHUNK),
        PrefixHasher({"namespace": "a"}, 2 * CHUNK),
        PrefixHasher({"namespace": "a"}, CHUNK, b"secret"),
    ]
    digests = {each.root_digest(root) for each in [plain, *others]} | {plain.root_digest({})}
    assert len(digests) == 5
    assert plain.root_digest(root) == PrefixHasher({"namespace": "a"}, CHUNK).root_digest(root)
    assert not plain.root_key(root).hex().startswith(plain.root_digest(root))


def test_canonical_bytes_ignore_order_and_refuse_objects() -> None:
    assert canonical_bytes({"b": 1, "a": [None]}) == canonical_bytes({"a": [None], "b": 1})
    with pytest.raises(TypeError):
        canonical_bytes({"a": object()})
    with pytest.raises(ValueError, match="JSON"):
        canonical_bytes(float("nan"))


# -- lookahead and tails ---------------------------------------------------------------------------


def keys_ahead(tokens: list[int], lookahead: int = 1, **identity: Any) -> list[bytes]:
    model = {"namespace": "a", "weights": "w"}
    request = RequestKeys(
        PrefixHasher(model, CHUNK, lookahead=lookahead), RequestIdentity(**identity)
    )
    for end in range(len(tokens) + 1):  # one token at a time
        request.extend(tokens[:end])
    return list(request.keys)


def test_a_chunk_has_a_key_once_the_next_token_is_known() -> None:
    assert [len(keys_ahead(TOKENS[:n])) for n in (3, 4, 5, 8, 9, 12)] == [0, 0, 1, 1, 2, 2]
    assert [len(keys_ahead(TOKENS[:n], 3)) for n in (4, 6, 7, 11)] == [0, 0, 1, 2]


def test_the_next_token_is_in_a_chunks_key() -> None:
    """A drafter's KV of the chunk's last token depends on it."""
    one, other = keys_ahead(TOKENS), keys_ahead([*TOKENS[:8], 7, *TOKENS[9:]])
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_keys_differ_by_lookahead() -> None:
    assert not set(keys_ahead(TOKENS)) & set(keys(TOKENS))
    assert not set(keys_ahead(TOKENS)) & set(keys_ahead(TOKENS, 2))
    assert keys_ahead(TOKENS, 0) == keys(TOKENS)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("secret", [None, b"secret"])
def test_a_tail_has_its_own_key(secret: bytes | None, lookahead: int) -> None:
    """The key depends on the prompt, the tail's end, every token and the lookahead, and is no
    chunk's key."""
    hasher = PrefixHasher({"namespace": "a"}, CHUNK, secret, lookahead=lookahead)
    found = set[bytes]()
    prompts = [TOKENS[:length] for length in range(2, 12)]
    prompts += [[*TOKENS[:5], 7, 8], [*TOKENS[:6], 9], [*TOKENS[:5], 9, TOKENS[6]]]
    for tokens in prompts:
        request = RequestKeys(hasher, RequestIdentity())
        request.extend(tokens)
        request.name_tail(tokens, loads=True)
        ends_inside = (len(tokens) - 1) % CHUNK > 0
        assert (request.tail is not None) == ends_inside
        if request.tail is not None:
            assert request.tail.end == len(tokens) - 1
            assert request.loadable == [*request.keys[: request.tail.chunk], request.tail.key]
            assert request.end_of(len(request.loadable)) == len(tokens) - 1
            found |= {request.tail.key, *request.keys}
        else:
            assert request.loadable is request.keys
    # Eight lengths, two other tokens, another last token where it is looked ahead to, and two
    # chunks.
    assert len(found) == 8 + 2 + lookahead + 2


def test_a_sender_loads_no_tail() -> None:
    hasher = PrefixHasher({"namespace": "a"}, CHUNK)
    sent, received = (RequestKeys(hasher, RequestIdentity()) for _ in range(2))
    prompt = TOKENS[: CHUNK + 3]
    for request, loads in ((sent, False), (received, True)):
        request.extend(prompt)
        request.name_tail(prompt, loads=loads)
    assert sent.tail == received.tail is not None
    assert (sent.loadable, len(received.loadable)) == (sent.keys, 2)
    assert (sent.end_of(2), received.end_of(2)) == (2 * CHUNK, CHUNK + 2)


def test_a_full_tail_is_not_the_chunk() -> None:
    hasher = PrefixHasher({"namespace": "a"}, CHUNK)
    parent = hasher.root_key({})
    (chunk,) = hasher.extend(parent, TOKENS[:CHUNK])
    tails = {hasher.tail_key(parent, TOKENS[:n]) for n in range(CHUNK + 1)}
    assert len(tails) == CHUNK + 1
    assert chunk not in tails
    last = TOKENS[CHUNK - 1].to_bytes(4, "little")
    assert hasher.tail_key(parent, TOKENS[: CHUNK - 1], extra=last) not in tails
