"""`qtool report`: everything that is known of some artifacts, as one page that needs nothing else.

gather (files -> facts) and page (facts -> HTML) know nothing of each other's ways.
"""
