"""Predict a kernel from its machine code (SASS), without a GPU: predict.py, in four steps.

decode.py reads the machine code of a version, or of any file. execute/ executes some blocks of a
launch, to see what their warps do. time.py times those on a model of one multiprocessor, then the
grid on all. explain.py says which source lines the warps wait at.
"""
