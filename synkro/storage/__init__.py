"""Arrays in files of the user's, which are read, and written, by rows where they are used.

::

    files       which objects are such arrays, and what is to be known of them to open them elsewhere
    hdf5        datasets of h5py
    zarr        arrays of zarr
    opened      an array in a file that is open for reading, whatever its format: rows of it, by chunks
    reading     … in a thread of its own, one piece ahead
    targets     arrays of zarr's, which take what functions return
    checkpoint  results of a map, in a file of their own
"""
