"""A light client that loads any OpenAI-compatible endpoint and measures it.

Made to share two cores with the server it measures: its HTTP/1.1 is read by httptools, one time stamp per socket read, JSON only
for the first and last frames of a stream. It knows nothing of Quintet's processes and measures a rival just the same.
"""
