"""What every bench is run with: a bench itself says only what is measured, and who takes part.

``member`` is the program of a rank, with the ``Job`` that a contestant does there; ``start`` starts
ranks and ``team`` gives orders to all of them at once; ``turns`` has the contestants take turns;
``measurements`` holds what came of it; ``record``, ``table`` and ``picture`` show it; ``options``
are those that all benches have on the command line, and ``usage`` says what is wrong with a call.
"""
