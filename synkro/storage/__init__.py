"""Arrays that lie in files of other libraries' formats; each library is imported in its own file.

::

    targets  arrays of zarr's, which take what functions return
"""
