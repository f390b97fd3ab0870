"""The tile kernels for sm_90, in Gluon: producer and consumer warpgroups, asynchronous copies and matmuls."""
