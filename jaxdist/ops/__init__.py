"""Pure numerical functions, arrays in and arrays out.

Each fast path has a slow twin, and tests compare the two.
"""
