"""Its being here puts this folder on the path, so that the folders below can import the helpers in it."""
