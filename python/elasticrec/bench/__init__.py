"""What `elasticrec bench` measures: ours, and the limits it is measured against."""
