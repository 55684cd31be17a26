"""`elasticrec init`: detect what data files contain and write a first job for them.

- `detect`: finds the files, detects their format, describes text formats, chooses the evaluation data
- `encoding`: refuses text that is not UTF-8
- `detect_csv`: delimiter, header and fields of CSV
- `detect_typed`: columns of Parquet files and JSON lines
- `columns`: the kind of a column, by its values: text, whole numbers, real numbers, lists, times
- `roles`: which column is the label, a slot, a dense column, the weight, the time, or left out
- `job_file`: writes `job.yaml`, with comments where the user should check a guess
- `reader_file`: writes `reader.py` for JSON lines
"""
