# SPDX-License-Identifier: Apache-2.0
"""What tests of several files stand on: steps, lists of kernels, guarded memory, ranks, models of a class."""
