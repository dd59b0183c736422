"""``mpi``: the ranks are processes that an MPI launcher started."""
