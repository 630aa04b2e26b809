"""Row ``kernels`` of docs/gpu.md: the tests of tests/cuda on the real device.

They are collected here by ``conftest.py`` beside this file, which gives them the device. One at a time:
``pytest tests/gpu/test_kernels.py -k rms_norm``.
"""
