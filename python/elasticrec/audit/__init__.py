"""`elasticrec audit`: counts a run again from its data files, with its own code for parsing and hashing.

- `commands`, `audit`: the command, and the comparison of the expected counts with the newest checkpoint
- `units`, `hours`: the recorded units and passes of a run, and whether they cover the data
- `file_counter`: counts the samples of a file
- `line_formats`, `csv_format`, `user_reader`, `parquet`: samples of each format
- `values`, `signs`: texts to numbers, times and signs
- `counts`, `expected_rows`: show and click of each sign, after decay and eviction
- `checkpoint`, `part`: reads the checkpoint and its part files
- `overflow`: compares partitions that were full
"""
