"""Row ``kernels`` of docs/gpu.md: the tests of tests/cuda on the real device.

``conftest.py`` in this folder collects them and supplies the device. A single test: ``pytest tests/gpu/test_kernels.py -k
rms_norm``.
"""
