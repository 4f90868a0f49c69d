"""What touches numbers: config, formula, pool, decoder, sampler, tokenizer, checkpoints."""

import os

# Read when OpenMP is loaded, so before torch and numba. Threads that wait for the next part of a step spin for some
# tens of microseconds and then sleep, for the event loop needs the same cores. 'active' bounds the spinning of a
# process in which more threads than there are CPUs have ever computed something (one that loads, one that serves): to
# 1,000 rounds and not to 100, with which every part of a step waited for a sleeping thread.
os.environ.setdefault("OMP_WAIT_POLICY", "active")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
