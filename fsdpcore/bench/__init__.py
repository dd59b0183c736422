"""Measuring collectives the way nccl-tests does, alone or beside Gloo and MPI.

``cases`` says what is measured, ``contestants``, ``peer_gloo`` and ``peer_mpi`` whose
collectives, ``member`` is the program of a rank; ``main`` runs it all with what ``harness`` has
for every bench; ``rows``, ``table`` and ``plot`` show what came of it.
"""
