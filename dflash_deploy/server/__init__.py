"""One running server: started, owned, waited for, stopped, nothing left behind."""
