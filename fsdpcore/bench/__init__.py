"""Measuring collectives the way nccl-tests does, alone or beside Gloo and MPI.

``cases`` says what is measured, ``member`` is the program of a rank that measures, ``team`` the
ranks of one competitor, ``session`` asks the teams in turn, ``table``, ``record`` and ``plot``
show what came of it.
"""
