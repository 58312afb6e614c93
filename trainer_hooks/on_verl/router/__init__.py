"""verl's rollouts: a router actor that places and moves requests, and clients that continue moved ones.

``setup`` runs in the driver, ``actor`` in the router's own process, ``client`` in verl's agent loops.
"""
