print('größe')
