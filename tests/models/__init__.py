# SPDX-License-Identifier: Apache-2.0
"""Models, engines and steps of other libraries, which the tests of the adapters run."""
