"""What ``kv_role`` says, and the other ways to choose the connector."""

from __future__ import annotations

from tests.support.engines.calls import check_integrity, chunk_keys
from tests.support.engines.instance import StartInstance
from tests.support.engines.settings import kv_transfer
from tests.support.prompts import random_prompt
from tests.support.redis.servers import Server
from tests.support.redis.values import wait_for_values


def test_a_producer_stores_and_a_consumer_loads(start: StartInstance, valkey: Server) -> None:
    prompt = random_prompt(1, 1300)
    with start(kv_transfer("kv_producer", redis_url=valkey.unix_url)) as producer:
        cold = producer.serve(prompt)
        producer.reset_prefix_cache()
        assert producer.serve(prompt).external_hit_tokens == 0
        producer.call(check_integrity)
        assert "holds less than one prompt" not in producer.log
    wait_for_values(valkey, 20)
    # Also chosen by module path, and with a configuration of its own.
    transfer = kv_transfer("kv_consumer", redis_url=valkey.unix_url, cpu_gib=0.02)
    transfer["kv_connector_module_path"] = "lmcache_connector"
    with start(transfer) as consumer:
        hit = consumer.serve(prompt)
        assert hit.external_hit_tokens == 1280
        assert hit.block_digests[:10] == cold.block_digests[:10]
        consumer.serve(random_prompt(2, 1300))
        assert consumer.counts().total("store_jobs") == 0
        consumer.call(check_integrity)
        assert consumer.log.count("cpu_gib 0.02 holds less than one prompt of max_model_len") == 1
        keys = consumer.call(chunk_keys, random_prompt(2, 1300))
    with valkey.client() as client:
        assert len(keys) == 5
        assert not [name for key in keys for name in client.scan_iter(f"lmc:*{key.hex()}*")]
