"""`data convert` and `data split`: samples of existing files written to new files.

- `input_data`: the files of a command, with the job that describes them, given or detected
- `rows`: the columns of raw values, and the reader for each format
- `rows_text`, `rows_parquet`, `rows_objects`: lines, Parquet, and JSON or a custom reader to chunks of raw values
- `values`: checks of numbers, labels and categories
- `targets`: chunks of raw values to files of each format
- `convert`: `data convert`
- `split`: `data split`
- `output`: new files, written completely or not at all
"""
