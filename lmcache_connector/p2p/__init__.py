"""Straight from engine to engine: ``LMCacheP2PConnector`` for disaggregated prefill.

::

    prefill instance                                     decode instance
    ----------------                                     ---------------
    connector.py -> scheduler_side.py                    connector.py -> scheduler_side.py
         | plan: saves                                        | plan: loads
    producer.py                                          consumer.py
      saver.py    paged cache -> outbox.py                 loader.py   inbox.py -> paged cache
      couriers.py outbox -> peers     -- data plane -->    (transport.py: TCP or NCCL)
      control.py  <-- hello, want ------- control plane -- control.py (ZeroMQ, msgpack)

Data always flows from the producer's outbox to the consumer's inbox, in frames of one layer each.
What differs between the modes is who starts it: the producer as it saves (``PUT``, ``PUT_ASYNC``),
or a consumer that wants it (``GET``).
"""
