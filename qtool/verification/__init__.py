"""`qtool verify`: is an artifact whole, are its numbers sane, how far is it from its source?"""
