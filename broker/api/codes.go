package api

import (
	"reflect"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// ErrorCodes calls yield with every error code of a response, its partitions'
// too, other than 0. It is for those who count them.
func ErrorCodes(resp kmsg.Response, yield func(code int16)) {
	some := func(code int16) {
		if code != 0 {
			yield(code)
		}
	}
	// What is sent thousands of times a second goes without reflection.
	switch r := resp.(type) {
	case *kmsg.ProduceResponse:
		for i := range r.Topics {
			for j := range r.Topics[i].Partitions {
				some(r.Topics[i].Partitions[j].ErrorCode)
			}
		}
	case *kmsg.FetchResponse:
		some(r.ErrorCode)
		for i := range r.Topics {
			for j := range r.Topics[i].Partitions {
				some(r.Topics[i].Partitions[j].ErrorCode)
			}
		}
	case nil:
	default:
		errorCodes(reflect.ValueOf(resp), some)
	}
}

// errorCodes finds the fields that kmsg calls ErrorCode, in every request alike.
func errorCodes(v reflect.Value, some func(int16)) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			errorCodes(v.Elem(), some)
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() != reflect.Struct {
			return
		}
		for i := range v.Len() {
			errorCodes(v.Index(i), some)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Field(i); v.Type().Field(i).Name == "ErrorCode" && f.Kind() == reflect.Int16 {
				some(int16(f.Int()))
			} else if v.Type().Field(i).IsExported() {
				errorCodes(f, some)
			}
		}
	}
}
