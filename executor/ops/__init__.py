"""The operations a model is made of: one file each, with signature, shapes and a torch reference.

`quintet.executor.ops.table` says which implementation each platform uses; models only ever see the table.
"""
