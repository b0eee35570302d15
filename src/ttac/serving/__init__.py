"""`ttac serve`: a classifier behind HTTP that answers at once and adapts behind the scenes.

    request -> protocol / decode -> batcher -> live model -> answer
                                       |           ^
                                       v           |
                                      ring       slots
                                       |           ^
                                       v           |
                                    learner ---> guard
                                       |
                                       v
                                 state folder (versions, snapshot, journal)

The upper half is the predictor, the lower half the adapter: two processes that share the memory of the ring and of the
slots, and never wait for each other. A supervisor starts both, and starts each again when it dies.
"""
