"""The healer removes only what it has seen to be wrong."""

from __future__ import annotations

import time

from lmcache_connector.storage.chunk_codec import Sealer, stripe_header
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.connections import Servers
from lmcache_connector.storage.redis.healer import Healer, Suspect
from lmcache_connector.storage.redis.topology import make_topology
from lmcache_connector.storage.redis.value_names import chunk_tag, stripe_suffix
from tests.support.redis.chunks import GEOMETRY, chunk_key, config, open_tier, put_all
from tests.support.redis.servers import Server


def heal(its_config: RedisTierConfig, *, is_mine: bool = True) -> None:
    """Look again at all values of the first chunk."""
    servers = Servers(
        its_config, make_topology(its_config, time.monotonic), time.monotonic, lambda: 0.5
    )
    healer = Healer(servers)
    for stripe in GEOMETRY.stripes(its_config.max_payload_bytes):
        name = chunk_tag(its_config.namespace, chunk_key(0)) + stripe_suffix(stripe)
        expected = stripe_header(GEOMETRY, stripe, chunk_key(0), keyed=False)
        healer.add(Suspect(name, expected, Sealer(None)))
    for _ in range(8):
        healer.heal(lambda node: is_mine)


def test_what_is_sound_when_it_is_looked_at_again_stays(valkey: Server) -> None:
    """Somebody has written it anew since; what is wrong still goes."""
    with open_tier(valkey.url) as tier:
        assert put_all(tier, [0]) == [True]
    its_config = config(valkey.url)
    with valkey.client() as client:
        names = sorted(client.keys("lmc:*-*"))
        wrong, lost = names[0], names[1]
        client.setrange(wrong, client.strlen(wrong) - 1, b"?")
        client.delete(lost)
        heal(its_config, is_mine=False)  # another thread's
        assert sorted(client.keys("lmc:*-*")) == [wrong, *names[2:]]
        heal(its_config)
        assert sorted(client.keys("lmc:*-*")) == names[2:]


def test_a_value_that_may_not_be_looked_at_stays(valkey: Server) -> None:
    """Somebody else has written it anew since, and this user has no GET: it reads by GETEX."""
    with open_tier(valkey.url) as tier:
        put_all(tier, [0])
    with valkey.client() as client:
        names = sorted(client.keys("lmc:*-*"))
        client.acl_setuser(
            "healer", enabled=True, passwords=["+pw"], keys=["lmc:*"], reset=True,
            commands=["+exists", "+getex", "+strlen", "+watch", "+multi", "+exec", "+unlink"],
        )  # fmt: skip
    its_config = config(valkey.url.replace("redis://", "redis://healer:pw@"))
    heal(its_config)
    with valkey.client() as client:
        assert sorted(client.keys("lmc:*-*")) == names
