"""Models from elsewhere: hf:// and s3:// into a folder that processes, pods and nodes share.

`obtain.py` is the way in. Nothing here reads what is in a model's files, and nothing here imports torch.
"""
