"""Pure numerical functions, arrays in and arrays out; each fast path has a slow twin that tests compare it with."""
