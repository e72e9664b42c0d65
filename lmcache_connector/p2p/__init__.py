"""``LMCacheP2PConnector`` hands KV from prefill to decode instances, for disaggregated serving.

::

    prefill instance                                     decode instance
    ----------------                                     ---------------
    scheduler/  plans saves                              scheduler/  plans loads
         |                                                    |
    worker/producer                                      worker/consumer
      saver    paged cache -> send_buffer                  loader   receive_buffer -> paged cache
      sender   send_buffer -> peers  ---- data/ (TCP, NIXL) ---->  receive_buffer
      control/server <-------- want, keep, forget (TCP, msgpack) -- poller, over control/client
      sender, over control/client ------- offer, forget ---------> control/server

KV flows from the producer's send buffer to the consumer's receive buffer, in frames of one layer
each. The modes differ in who starts it: the producer as it saves (``PUT``, ``PUT_ASYNC``), or the
consumer that wants it (``GET``). By NIXL the consumer's ``reader`` fetches prompts straight out of
the paged cache, where the producer has ``held`` them.
"""
